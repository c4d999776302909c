"""Shared by the commands: options and exit codes, output formats, one connection per command."""
