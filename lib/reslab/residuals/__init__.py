"""The heart: residual connections as one small vocabulary that every model speaks.

`connection` has the two calls and the registry, `stack` puts sublayers, norms and connections together; the
kinds are in `additive`, `denseformer`, `depth_attention`, `hyper`, `rounding`, `state_attention` and
`value_residual`.
"""

from reslab.residuals.additive import (
    Add,
    Highway,
    LayerNormScaling,
    LayerScale,
    NoConnection,
    Rescaled,
    ReZero,
    Scaled,
    SkipInit,
    WeightedSkip,
)
from reslab.residuals.connection import (
    CONNECTIONS,
    Connection,
    ConnectionConfig,
    ConnectionOptions,
    Ends,
    Site,
    Stream,
    connect,
    connection_modules,
    connection_rates,
    register,
    reset_connections,
)
from reslab.residuals.denseformer import DenseFormer
from reslab.residuals.depth_attention import AttnRes
from reslab.residuals.hyper import HyperConnection
from reslab.residuals.rounding import Kahan, Stochastic
from reslab.residuals.stack import Block, Placement, Residual, ResidualSettings, Stack, compile_blocks, require_fit
from reslab.residuals.state_attention import StateAttention
from reslab.residuals.value_residual import ValueResidual

__all__ = [
    "CONNECTIONS",
    "Add",
    "AttnRes",
    "Block",
    "Connection",
    "ConnectionConfig",
    "ConnectionOptions",
    "DenseFormer",
    "Ends",
    "Highway",
    "HyperConnection",
    "Kahan",
    "LayerNormScaling",
    "LayerScale",
    "NoConnection",
    "Placement",
    "ReZero",
    "Rescaled",
    "Residual",
    "ResidualSettings",
    "Scaled",
    "Site",
    "SkipInit",
    "Stack",
    "StateAttention",
    "Stochastic",
    "Stream",
    "ValueResidual",
    "WeightedSkip",
    "compile_blocks",
    "connect",
    "connection_modules",
    "connection_rates",
    "register",
    "require_fit",
    "reset_connections",
]
