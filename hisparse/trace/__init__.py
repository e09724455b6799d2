"""Selection traces: which positions a layer reads in each step, made or recorded, and what would miss under a policy."""
