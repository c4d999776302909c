"""Plans: who is admitted, who gets more, who leaves, how large hot buffers are. All pure."""
