"""Zero-copy exchange of arrays with other frameworks.

By DLPack, array interfaces and raw pointers, in both directions.

np.from_dlpack(export(array))                     # a view; read-only unless asked otherwise
jnp.from_dlpack(fit(array, "jax"))                # refused if JAX would copy, narrow or misread it
torch.from_dlpack(fit(array, "torch", copy=True)) # as it is where torch takes it so, a copy otherwise
as_array(x)                                       # any framework's array as a NumPy (or CuPy) array
"""

from pagedkv.interop.exports import empty as empty
from pagedkv.interop.exports import export as export
from pagedkv.interop.imports import as_argument as as_argument
from pagedkv.interop.imports import as_array as as_array
from pagedkv.interop.imports import as_view as as_view
from pagedkv.interop.imports import exchanges as exchanges
from pagedkv.interop.needs import fit as fit
from pagedkv.interop.pages import Pages as Pages
from pagedkv.interop.pages import block_views as block_views
from pagedkv.interop.pages import pages_of as pages_of
from pagedkv.interop.view import RawArray as RawArray
from pagedkv.interop.view import View as View
