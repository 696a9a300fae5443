# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Serving: recurrent states in slots (`slots`, `families`), the vLLM plugin and `luna-mega serve`."""
