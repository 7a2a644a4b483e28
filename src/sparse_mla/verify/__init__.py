"""Proof that long prefill is right: by hash over chunk plans, and by an independent reference. See docs/verify.md."""
