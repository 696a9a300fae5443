"""The vLLM plugin (`plugin`), and models whose recurrent states are in slots (`served_models`, `slots`)."""
