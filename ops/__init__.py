"""What each op means: arguments, checks, mathematics, reference and gradients. Knows no backend."""

from headmux.ops.flce import FLCEOutput, flce
from headmux.ops.jsd import jsd
from headmux.ops.linear_logp import LogpOutput, linear_logp

__all__ = ["FLCEOutput", "LogpOutput", "flce", "jsd", "linear_logp"]
