"""A node's accounts: ledger, changes, the HostPool actor that owns them, and the audit that compares them."""
