"""What the commands share: options and exit codes, output formats, one connection per command."""
