"""The vLLM plugin (`plugin`), and models whose recurrent states are in slots (`families`, `slots`)."""
