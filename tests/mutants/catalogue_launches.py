"""Mistakes in launches that are worked out once and repeated."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RECIPE, ATTENTION = "pagedkv/kernels/recipe.py", "pagedkv/attention/paged_attention.py"
ON_A_GPU = "return array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id"

MUTANTS = (
    Mutant(
        "arrays with other strides have the same signature",
        RECIPE,
        (("return array.shape, array.strides, array.dtype, address(array) & 15, array.flags.writeable",
          "return array.shape, array.dtype, address(array) & 15, array.flags.writeable"),),
        ("test_another_form_that_fits_is_worked_out_anew", "test_another_array_on_the_host_has_another_signature"),
        quick=True,
    ),
    Mutant(
        "an array on another GPU has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, array.dtype, data.ptr & 15"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "an array that is less aligned has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, array.dtype, data.device_id"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "an array of another dtype has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, data.ptr & 15, data.device_id"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "two launches at once share a struct",
        RECIPE,
        (("filled = self._spare.pop()", "filled = self._spare[-1]"),),
        ("test_a_launch_within_a_launch_has_a_struct_of_its_own",),
    ),
    Mutant(
        "a spare struct holds the arrays of its last launch",
        RECIPE,
        (("        filled.params.arrays = ()\n", ""),),
        ("test_a_launch_holds_no_array_of_a_layer_that_is_gone",),
    ),
    Mutant(
        "launches outlive the arrays of their batch",
        ATTENTION,
        (("self._places, self._launches = places, {}", "self._places = places"),),
        ("test_a_plan_over_the_same_arrays_keeps_the_launches_and_other_arrays_get_their_own",),
    ),
    Mutant(
        "the output is no part of the form",
        ATTENTION,
        (("form = (kv_form, signature(q), signature(out), signature(lse))", "form = (kv_form, signature(q))"),),
        ("test_another_form_that_fits_is_worked_out_anew",
         "test_another_form_that_does_not_fit_is_refused_as_the_first_time"),
    ),
    Mutant(
        "all layers have the tensor maps of the first",
        "pagedkv/kernels/layer_launch.py",
        (("self._maps.get((k_address, v_address))", "next(iter(self._maps.values()), None)"),),
        ("test_layers_of_one_form_are_worked_out_once_and_get_their_own_addresses",),
    ),
    Mutant(
        "an array on another GPU is taken",
        "pagedkv/kernels/arrays.py",
        (("if None not in (own, found) and own != found:", "if False:"),),
        ("test_arrays_in_host_memory_or_on_another_gpu_are_refused",),
    ),
    Mutant(
        "bfloat16 is read as float16",
        "pagedkv/kernels/dtypes.py",
        ((" or own != found:", ":"),),
        ("test_another_form_that_does_not_fit_is_refused_as_the_first_time",),
    ),
)
