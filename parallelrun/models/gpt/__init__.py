"""The GPT-2/3 family and, by options, the Llama family: one code, written as for one device."""
