"""Evidence in, one diagnosis out: cause, proof, cure, and what was checked and found well."""
