"""Live requests and workers as data: life cycle, place, history, groups, and the messages that change them."""
