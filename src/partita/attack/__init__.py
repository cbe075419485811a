"""What Byzantine clients do to their uploads, or to their data. An attack is one file with its definition."""

from partita.attack.alie import alie
from partita.attack.gaussian import gaussian
from partita.attack.ipm import ipm
from partita.attack.label_flip import label_flip
from partita.attack.malformed import malformed
from partita.attack.mimic import mimic
from partita.attack.nonfinite import nonfinite
from partita.attack.sign_flip import sign_flip

__all__ = ["alie", "gaussian", "ipm", "label_flip", "malformed", "mimic", "nonfinite", "sign_flip"]
