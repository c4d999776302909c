"""The decode loop: one thread that owns the device, and what its steps read and report."""
