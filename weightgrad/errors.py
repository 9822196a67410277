"""Every error WeightGrad raises on purpose, drawn as a tree.

    WeightGradError
    ├── SpecError                 a codec spec or one of its arguments is wrong
    ├── EncodeError
    │   ├── NonFiniteError        NaN or Inf in what was to be encoded
    │   ├── RangeError            a finite value the format cannot hold
    │   └── StateError            a state that belongs to another codec or tensor
    ├── DecodeError               a payload is not what its codec writes
    │   ├── ParamsError           its parameters are malformed or out of range
    │   ├── BodyLengthError       its body is longer or shorter than they say
    │   └── BodyContentError      its body holds what no encoder writes
    ├── FrameError                bytes are not a frame
    │   ├── MagicError            they do not start like one
    │   ├── VersionError          a version this build does not read
    │   ├── TruncatedError        they end too early
    │   ├── TrailingBytesError    they go on after the frame
    │   ├── ChecksumError         they were damaged
    │   ├── ReservedError         a field or padding that must be zero is not
    │   ├── SizeLimitError        larger than the caller's limits
    │   ├── UnknownCodecError     a codec id this build does not know
    │   ├── UnknownDtypeError     a dtype id this build does not know
    │   └── ShapeError            more dimensions than a frame may have
    ├── NativeError               the native kernels cannot do what was asked
    ├── UnitError                 a quantity such as "100 Mbit/s" that cannot be read
    ├── RecipeError               a recipe has a mistake; names the file and the line
    ├── StrategyError             a row of parts that do not fit together
    ├── PlanError                 `weightgrad plan` was asked for what it cannot work out
    ├── ProtocolError             a message that no honest peer would send now
    ├── RunError                  a run directory that is missing, damaged or of another recipe
    ├── ModelFileError            a model file that is missing, damaged, or not of the kind that was asked for
    ├── CheckpointError           a checkpoint that is damaged, of another model, or cannot be written
    ├── CredentialsError          certificates that are missing, expired, revoked or of somebody else
    ├── RefusedError              the global server does not let this site in, and says why
    ├── LinkError                 the global server cannot be reached
    ├── DataError                 a data set that is missing, damaged or unreachable
    ├── TopologyError             hosts and links that do not make a network
    └── EmulatorError             the emulated network cannot be made, or one of its commands failed
        └── NamespacesRefusedError    this machine does not let us make network namespaces

A message says what came, what was wanted and what to do.
"""

from __future__ import annotations


class WeightGradError(Exception):
    """Root of the tree."""


class SpecError(WeightGradError, ValueError):
    """A codec spec, or one of its arguments, is wrong."""


class EncodeError(WeightGradError, ValueError):
    """A tensor cannot be encoded."""


class NonFiniteError(EncodeError):
    """NaN or Inf in what was to be encoded."""


class RangeError(EncodeError):
    """A finite value that the wire format cannot hold."""


class StateError(EncodeError):
    """A codec state that belongs to another codec or another tensor."""


class DecodeError(WeightGradError, ValueError):
    """A payload is not what its codec writes."""


class ParamsError(DecodeError):
    """The parameters of a payload are malformed or out of range."""


class BodyLengthError(DecodeError):
    """The body of a payload is longer or shorter than its parameters say."""


class BodyContentError(DecodeError):
    """The body of a payload holds what no encoder writes."""


class FrameError(WeightGradError, ValueError):
    """Bytes are not a frame."""


class MagicError(FrameError):
    """The bytes do not start like a frame."""


class VersionError(FrameError):
    """A version of the format that this build does not read."""


class TruncatedError(FrameError):
    """The bytes end before the frame does."""


class TrailingBytesError(FrameError):
    """There are bytes after the frame."""


class ChecksumError(FrameError):
    """The frame was damaged on its way."""


class ReservedError(FrameError):
    """A field, or padding, that must be zero is not."""


class SizeLimitError(FrameError):
    """The frame is larger than the caller's limits."""


class UnknownCodecError(FrameError):
    """A codec id that this build does not know."""


class UnknownDtypeError(FrameError):
    """A dtype id that this build does not know."""


class ShapeError(FrameError):
    """More dimensions than a frame may have."""


class NativeError(WeightGradError, RuntimeError):
    """The native kernels cannot do what was asked of them."""


class UnitError(WeightGradError, ValueError):
    """A quantity such as "100 Mbit/s" that cannot be read."""


class RecipeError(WeightGradError, ValueError):
    """A recipe has a mistake."""


class StrategyError(WeightGradError, ValueError):
    """A strategy that does not exist, or parts that do not fit together."""


class PlanError(WeightGradError, ValueError):
    """`weightgrad plan` was asked for what it cannot work out."""


class ProtocolError(WeightGradError, RuntimeError):
    """A message that no honest peer would send at this point."""


class RunError(WeightGradError, RuntimeError):
    """A run directory that is missing, damaged, or of another recipe."""


class DataError(WeightGradError, RuntimeError):
    """A data set that is missing, damaged or unreachable."""


class ModelFileError(WeightGradError, ValueError):
    """A model file that is missing, damaged, or not of the kind that was asked for."""


class CheckpointError(WeightGradError, RuntimeError):
    """A checkpoint that is damaged, of another model, or cannot be written."""


class CredentialsError(WeightGradError, RuntimeError):
    """Certificates that are missing, expired, revoked, or of somebody else."""


class RefusedError(WeightGradError, RuntimeError):
    """The global server does not let this site in."""


class LinkError(WeightGradError, RuntimeError):
    """The global server cannot be reached."""


class TopologyError(WeightGradError, ValueError):
    """Hosts and links that do not make a network."""


class EmulatorError(WeightGradError, RuntimeError):
    """The emulated network cannot be made, or one of its commands failed."""


class NamespacesRefusedError(EmulatorError):
    """This machine does not let us make network namespaces."""
