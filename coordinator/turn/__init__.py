"""Parts of one turn of the Scheduler: effects of events, adoption, recovery, audits, listings."""
