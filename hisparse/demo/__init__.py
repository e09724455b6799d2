"""`./demo`: a prefill/decode service on a local Ray cluster, asked real questions, every token checked."""
