"""examples/s4d_classifier.py: it trains, and a layer of S4D has the same losses with `diagonal_ssm`."""

import re

import pytest
import torch


def test_losses_of_s4d_do_not_change(script):
    """Ten training steps of S4D's layer have the same losses with FFT and with `diagonal_ssm`."""
    losses = script("s4d_classifier").compare(300, batch=2, channels=8, states=4, steps=10)
    assert losses["FFT"][0] - losses["FFT"][-1] > 1e-4
    torch.testing.assert_close(losses["diagonal_ssm"], losses["FFT"], rtol=1e-5, atol=0)


def test_command_line(script, capsys):
    main = script("s4d_classifier").main
    main(["--steps=20", "--length=60"])
    assert re.search(r"step 20: loss \d\.\d+\naccuracy on 300 new waves: \d+\.\d%\n", capsys.readouterr().out)


@pytest.mark.slow
def test_classifier_learns(script):
    torch.manual_seed(0)
    assert script("s4d_classifier").train(120, 2048) > 0.95
