# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Served models: states in slots (`slots`, `families`), vLLM's plugin and `luna-mega serve`."""
