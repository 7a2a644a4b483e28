"""eager: torch operations only, every geometry, any device, always in strict mode; production on a CPU."""
