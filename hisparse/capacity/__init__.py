"""How many requests a deployment carries, with and without a host tier, before anything is bought or started."""
