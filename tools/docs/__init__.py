"""Documents that are followed literally, and texts and pictures in them that a real run writes."""
