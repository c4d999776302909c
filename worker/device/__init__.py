"""The memories of the device: their sizes, their free lists and what a worker holds of them."""
