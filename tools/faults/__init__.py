"""Real processes and journals that are killed, hung and damaged again and again."""
