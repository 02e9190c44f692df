"""Lookup inside the model in int4 (methods/within.py), as a command: `--draft lab/within.py:lookup`."""
from machine.quant import quantise
from methods.suffix import Suffix
from methods.within import Within
from support.drafts import recorded_with


def lookup(model, gamma):
    twin = quantise(model, "int4", head="int4")
    return Within(recorded_with(model, twin), Suffix(3), gamma)
