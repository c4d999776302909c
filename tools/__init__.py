"""Programs for people who work on the project, each run by hand as `python -m tools.ROOM.PROGRAM`.

They use the rigs of `tests/support`, which imports nothing from here. Tests try the programs.
"""
