"""Foreign contracts, one per file: nothing else knows another framework or code base."""
