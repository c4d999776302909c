"""Who runs where: the Scheduler and its RequestTable, and the pure parts that decide for them."""
