"""The actor that decides what runs where: its turns, its calls, and what is checked before anything joins or queues."""
