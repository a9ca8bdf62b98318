"""Mistakes in tilings, tensor maps, shared memory, and under an old driver."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODE_TMA, DECODE_MLA = "pagedkv/kernels/decode_tma.py", "pagedkv/kernels/decode_mla.py"
DRIVER, MAPS = "pagedkv/kernels/driver.py", "pagedkv/kernels/tensor_map.py"
BACKEND = "pagedkv/kernels/cupy_backend.py"
TWO_CTAS = ("test_two_ctas_share_a_multiprocessor_where_each_holds_two_tiles",)
OF_LATENTS = ("test_rows_and_ctas_by_the_number_of_heads_and_as_many_tiles_as_fit_on_the_device",)
RUNS = ("test_l2_fetches_no_more_than_a_contiguous_run_at_a_time",)
OLD_DRIVER = ("test_a_kernel_with_tma_is_refused_by_a_driver_older_than_tensor_maps",)
CARVE_OUT = ("test_a_kernel_may_use_all_shared_memory_from_the_moment_it_is_loaded",)

MUTANTS = (
    Mutant(
        "two CTAs share a multiprocessor with room for a tile each",
        DECODE_TMA,
        (("TWO_TILES = 4", "TWO_TILES = 2"),),
        TWO_CTAS,
    ),
    Mutant(
        "two CTAs share a multiprocessor without the registers",
        DECODE_TMA,
        ((" and rows * (config.head_dim + 2 * config.head_dim_v) <= 16 * 3 * 128 else 1", " else 1"),),
        TWO_CTAS,
    ),
    Mutant(
        "16 rows have a multiprocessor to themselves",
        DECODE_TMA,
        (("<= 16 * 3 * 128 else 1", "<= 8 * 3 * 128 else 1"),),
        TWO_CTAS,
    ),
    Mutant(
        "few heads over latents have a multiprocessor to themselves",
        DECODE_MLA,
        (("FEW_SHAPES = ((16, 2), (16, 1))", "FEW_SHAPES = ((16, 1),)"),),
        OF_LATENTS,
    ),
    Mutant(
        "17 heads over latents take two tiles of 16 rows",
        DECODE_MLA,
        (("config.group_size > MANY_ROWS else", "config.group_size > 2 * MANY_ROWS else"),),
        OF_LATENTS,
    ),
    Mutant(
        "tiles of latents leave no room for what every CTA needs",
        DECODE_MLA,
        ((" // ctas - 2 * RESERVED_BYTES\n", " // ctas\n"),),
        ("test_every_cta_leaves_room_for_what_it_has_beside_its_tiles",),
    ),
    Mutant(
        "latents have a tile less than there is room for",
        DECODE_MLA,
        (("// latents_bytes(config), MAX_STAGES)", "// latents_bytes(config) - 1, MAX_STAGES)"),),
        OF_LATENTS,
    ),
    Mutant(
        "tiles of latents fill the shared memory of another device",
        DECODE_MLA,
        (("(shared_limit(capability) + RESERVED_BYTES) // ctas", "(shared_limit((9, 0)) + RESERVED_BYTES) // ctas"),),
        OF_LATENTS,
    ),
    Mutant(
        "the tiling is that of an H100 on every device",
        "pagedkv/kernels/select.py",
        (("decode_mla.tiling(config, capability))", "decode_mla.tiling(config, (9, 0)))"),),
        OF_LATENTS,
    ),
    Mutant(
        "one tile of latents is enough",
        DECODE_MLA,
        (("MIN_STAGES, MAX_STAGES = 2, 6", "MIN_STAGES, MAX_STAGES = 1, 6"),),
        ("test_latents_of_which_two_tiles_do_not_fit_are_refused_with_the_bytes",),
    ),
    Mutant(
        "many heads take no tiles of 16 rows where those of 32 do not fit",
        DECODE_MLA,
        (("MANY_SHAPES = ((32, 1), *FEW_SHAPES)", "MANY_SHAPES = ((32, 1),)"),),
        ("test_many_heads_go_in_tiles_of_16_rows_where_32_do_not_fit",),
    ),
    Mutant(
        "L2 promotion is always of 256 bytes",
        MAPS,
        (("_L2_PROMOTIONS.get(l2_bytes(start, itemsize, dims, strides, box), 0)", "_L2_PROMOTIONS[256]"),),
        RUNS,
    ),
    Mutant(
        "a box's run goes on into the next head",
        MAPS,
        (("if side > 1 and stride == run:", "if stride == run:"),),
        RUNS,
    ),
    Mutant(
        "runs are taken to begin at multiples of 256 bytes",
        MAPS,
        (("run, apart = dims[0] * itemsize, [start]", "run, apart = dims[0] * itemsize, [0]"),),
        RUNS,
    ),
    Mutant(
        "rows of a head's block are not one run",
        MAPS,
        (("            run *= dim\n", "            pass\n"),),
        RUNS,
    ),
    Mutant(
        "a kernel leaves memory that others divided as it is",
        BACKEND,
        (("            kernel.preferred_shared_memory_carveout = _ALL_SHARED\n", ""),),
        CARVE_OUT,
    ),
    Mutant(
        "a CTA of prefill_mma has more shared memory than some devices",
        "pagedkv/kernels/prefill_mma.py",
        (("and (shaped or crowded)", "and shaped"),),
        ("test_a_cta_has_the_shared_memory_of_every_device_beside_its_own",),
    ),
    Mutant(
        "the shared memory that a kernel has itself is not counted",
        "pagedkv/kernels/cupy_backend.py",
        (("        if shared_bytes > room:", "        if shared_bytes > self.shared_limit:"),),
        ("test_more_shared_memory_than_there_is_is_refused_with_both_numbers",),
    ),
    Mutant(
        "a kernel asks for half of the shared memory",
        BACKEND,
        (("_ALL_SHARED = 100", "_ALL_SHARED = 50"),),
        CARVE_OUT,
    ),
    Mutant(
        "a driver without tensor maps is an AttributeError",
        DRIVER,
        (("    except AttributeError as error:\n", "    except ZeroDivisionError as error:\n"),),
        OLD_DRIVER,
    ),
    Mutant(
        "an old driver counts as one with tensor maps",
        DRIVER,
        (("        tensor_map_encoder(load_driver())\n    except", "        load_driver()\n    except"),),
        OLD_DRIVER,
    ),
    Mutant(
        "auto takes a kernel whose tensor maps the driver cannot make",
        "pagedkv/kernels/select.py",
        (("elif not has_tensor_maps and kernel.tiling(config, max_q_len, capability).box_tokens:", "elif False:"),),
        ("test_a_driver_older_than_tensor_maps_is_named",),
    ),
    Mutant(
        "a lane of decode_simt holds more of a row than stays in registers",
        "pagedkv/kernels/decode_simt.py",
        (("        vector //= 2", "        break"),),
        ("test_a_lane_holds_no_more_of_a_row_than_stays_in_registers",),
    ),
)
