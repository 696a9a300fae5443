# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The vLLM plugin (`plugin`), and models whose recurrent states are in slots (`families`, `slots`)."""
