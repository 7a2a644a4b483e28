"""sparse-mla as an attention backend of vLLM. Entry point: ``plugin:register``. Importing this imports no engine."""
