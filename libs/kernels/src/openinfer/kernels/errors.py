"""Everything this library raises.

KernelsError
 ├── ContractError (ValueError)       an op was called with arguments its contract does not allow
 ├── CompileError (RuntimeError)      the compiler refused a kernel
 ├── KernelMissing (LookupError)      no cubin for a kernel, and none may or can be compiled
 ├── InvalidAdapter (ValueError)      an adapter does not fit the model, or has settings that are not supported
 ├── InvalidTable (ValueError)        a file that is no table of kernel choices
 ├── LaunchError (RuntimeError)       a launch record cannot be run on this device
 ├── RankLost (ConnectionError)       a rank did not come to a collective
 ├── UnsupportedQuantization (ValueError) a checkpoint is packed in a way that no op reads
 ├── UntrustedCache (PermissionError) other users could have written what would be run as code
 └── MissingExtra (ImportError)       an optional dependency is needed; the message has the install command
"""


class KernelsError(Exception):
    """Base of all errors of openinfer.kernels."""


class ContractError(KernelsError, ValueError):
    """An op was called with shapes, dtypes or values that its contract does not allow."""


class CompileError(KernelsError, RuntimeError):
    """A kernel did not compile. The message names the kernel, the architecture and the compiler's words."""


class KernelMissing(KernelsError, LookupError):
    """A kernel is not in the store, and the store is sealed or no compiler is installed."""

    user_can_mend = True


class InvalidAdapter(KernelsError, ValueError):
    """A folder holds no adapter (LoRA) that this model can run. The message names the folder and the fault."""

    user_can_mend = True


class InvalidTable(KernelsError, ValueError):
    """A file is not a table of kernel choices, or it has changed since it was written."""

    user_can_mend = True


class LaunchError(KernelsError, RuntimeError):
    """A launch record does not fit this device (shared memory, scratch, an unbound workspace)."""


class UnsupportedQuantization(KernelsError, ValueError):
    """A checkpoint's quantization_config asks for a packing that no op reads. The message names the key."""

    user_can_mend = True


class UntrustedCache(KernelsError, PermissionError):
    """A folder of compiled kernels or of tables belongs to another user, or others can write to it."""

    user_can_mend = True


class RankLost(KernelsError, ConnectionError):
    """A rank of a communicator did not come to a collective in time. The ranks' states no longer fit together, so end
    all of them."""


class MissingExtra(KernelsError, ImportError):
    """A part of the library needs an optional dependency that is not installed."""

    user_can_mend = True
