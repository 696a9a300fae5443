# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""vLLM: the plugin (`plugin`), and models with recurrent states in slots (`families`, `slots`)."""
