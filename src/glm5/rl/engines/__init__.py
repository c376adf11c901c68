"""Programs that sample completions: `transformers` in this process, SGLang, and vLLM."""
