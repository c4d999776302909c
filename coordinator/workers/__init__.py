"""One actor per worker: its link, its numbered commands, its epochs and hellos."""
