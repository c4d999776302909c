"""The journal, which outlives a coordinator process: records, the store of records, and recovery from them."""
