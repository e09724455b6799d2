"""A load generator for OpenAI-compatible services: prompts, one measured request, phases of many."""
