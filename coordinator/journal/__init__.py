"""What survives a coordinator: records, the store that writes them, and recovery from them."""
