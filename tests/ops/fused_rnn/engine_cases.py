"""The shapes on which each CUDA engine is tested."""

from cases import Case

MASKS = ("state", "reset", "hold", "lengths")
# head widths: below, at and between those that the engines are compiled for
BLOCK = [
    Case(3, 7, 2, 16, MASKS),
    Case(9, 12, 3, 32, ("state",)),
    Case(17, 9, 2, 40, MASKS),
    Case(8, 33, 2, 64, ("state",)),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(5, 10, 1, 104, (*MASKS, "clip")),
    Case(16, 21, 2, 128, ("state",)),
]
GRID = [
    Case(3, 7, 1, 136, MASKS),
    Case(8, 12, 2, 256, ("state",)),
    Case(17, 9, 1, 200, MASKS),
    Case(4, 6, 1, 320, ("state", "cu", "reset", "hold")),
    Case(5, 10, 3, 264, (*MASKS, "clip")),
    Case(1, 40, 1, 512, ()),
    Case(40, 8, 1, 768, ("state",)),
    Case(2, 6, 1, 1024, ("state",)),
    Case(150, 5, 1, 768, ("state", "lengths")),  # tiles of sixteen sequences in both directions
    Case(60, 5, 1, 768, (*MASKS, "clip")),  # blocks of 24 units, with masks
    Case(64, 9, 1, 760, ("state",)),  # blocks of 24 units, the last with fewer
    Case(600, 3, 1, 768, ("state", "lengths")),  # more tiles than a group takes at once
]
GEMM = [
    Case(3, 7, 2, 16, MASKS),
    Case(70, 9, 1, 136, (*MASKS, "clip")),
    Case(33, 12, 2, 200, ("state",)),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(64, 5, 1, 1152, ()),
    Case(200, 4, 2, 264, ("state", "lengths")),  # two tiles of sequences
]
# Sequences and units for which the planner takes each kind of tile of the batch engine, of all cells
# in 16 bits and in TF32, with values to save and without.
TILES = [
    (64, 1152), (200, 1536), (200, 896), (384, 1536), (200, 1152), (640, 1152), (768, 1312), (1300, 1312),
    (4096, 264), (512, 1152), (1300, 896),
]  # fmt: skip
# With `hold` no state stays in shared memory.
_TILED = [Case(B, 3, 1, D, ("state", "lengths", "reset")) for B, D in TILES]
_TILED += [Case(B, 3, 1, D, ("state", "hold")) for B, D in TILES[::2]]
# Heads whose weights do not stay in L2 together: of an LSTM in 16 bits two launches, of two heads and
# of one, and in fp32 three.
PARTS = Case(70, 4, 3, 1608, ("state", "lengths", "reset"))
# One tile of sequences and several, the last with fewer; units that do not fill their tiles; a depth
# that ends within a panel of 64; a block with one tile, and with several.
BATCH = [
    Case(3, 7, 2, 16, MASKS),
    Case(70, 9, 1, 136, (*MASKS, "clip")),
    Case(140, 6, 2, 200, ("state",)),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(4, 9, 2, 64, ("state", "cu")),
    Case(300, 4, 1, 264, MASKS),
    Case(600, 3, 3, 384, ("state", "lengths")),
    Case(1024, 4, 1, 1152, ("state", "lengths", "reset")),  # states kept
    Case(1024, 4, 1, 1128, ("state",)),  # a last tile of 8 units, or of 12 where it could have 36
    Case(2048, 3, 1, 1152, ("state",)),  # tiles whose state is not kept
    PARTS,
    *_TILED,
    Case(512, 16, 1, 512, ("state",)),  # chosen by the planner
]
# The same for its tiles in fp32, whose panels are 32 elements deep, and whose widths are multiples of 4.
BATCH_TF32 = [
    Case(3, 7, 2, 16, MASKS),
    Case(70, 9, 1, 136, (*MASKS, "clip")),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(4, 9, 2, 64, ("state", "cu")),
    Case(300, 5, 1, 300, MASKS),
    Case(600, 3, 3, 384, ("state", "lengths")),
    Case(1024, 5, 1, 1148, ("state", "lengths", "reset")),  # 128 x 40, the last of 28 units
    PARTS,
    *_TILED,
    Case(512, 16, 1, 656, ("state",)),  # chosen by the planner
]
# Widths of every compiled width, in one block or a cluster; tiles of one sequence, of two for Elman cells,
# of four and of more.
FMA = [
    Case(3, 7, 2, 16, MASKS),
    Case(9, 12, 1, 32, ("state",)),
    Case(17, 9, 2, 44, MASKS),
    Case(4, 6, 2, 64, ("state", "cu", "reset", "hold")),
    Case(140, 5, 1, 64, MASKS),
    Case(600, 4, 2, 48, ("state", "lengths")),
    Case(5, 10, 1, 96, (*MASKS, "clip")),
    Case(150, 6, 1, 92, (*MASKS, "clip")),
    Case(3, 9, 1, 100, MASKS),
    Case(130, 5, 1, 128, ("state", "lengths")),
    Case(199, 5, 1, 128, MASKS),
    Case(57, 5, 1, 200, (*MASKS, "clip")),
    Case(67, 5, 1, 200, MASKS),
    Case(4, 6, 2, 132, ("state", "cu", "reset", "hold")),
    Case(70, 5, 2, 200, MASKS),
    Case(20, 7, 1, 256, (*MASKS, "clip")),
    Case(516, 3, 2, 24, ("state",)),  # too many sequences for a product in parts
]
# One to three heads, in one launch or several; one group of thread blocks or several; passes of two,
# four and eight sequences, and several passes; the operand staged in one piece or several.
WIDE = [
    Case(1, 9, 1, 260, ("state",)),
    Case(2, 5, 2, 300, MASKS),
    Case(3, 7, 1, 264, MASKS),
    Case(4, 6, 2, 520, ("state", "cu", "reset", "hold")),
    Case(8, 5, 3, 768, ("state", "lengths", "reset")),
    Case(13, 5, 2, 400, (*MASKS, "clip")),
    Case(40, 4, 1, 512, MASKS),
    Case(70, 4, 1, 272, ("state", "lengths")),
    Case(81, 3, 1, 580, ("state",)),  # fewer groups than would fit
    Case(6, 5, 1, 1280, MASKS),
    Case(17, 3, 1, 1144, ("state",)),
    # Of these a part of the weight streams in.
    Case(2, 3, 2, 1400, MASKS),
    Case(9, 3, 1, 1800, ("state",)),
    Case(1, 4, 1, 2048, ()),
]
# Widths that are no multiple of a 16-byte vector: they run padded.
ODD = [
    Case(3, 7, 2, 13, MASKS),
    Case(5, 10, 1, 100, (*MASKS, "clip")),
    Case(4, 6, 2, 50, ("state", "cu", "reset", "hold")),
    Case(17, 9, 1, 333, ("state",)),
    Case(70, 4, 1, 650, ("state", "lengths")),
]
# Small enough for compute-sanitizer, and together every kernel of each engine. Of the block engine:
# compiled width, masks or none, four or eight columns; of the grid engine: depth, and blocks of 24
# units with narrow and wide tiles; of the step engine: one sequence, few, up to and above 16, a
# width of no whole vectors.
TINY = {
    "block": [Case(3, 3, 2, D, options) for D in (16, 40, 104) for options in (("state",), MASKS)]
    + [Case(5, 2, 80, D, options) for D in (16, 40, 104) for options in ((), ("hold",))],
    "grid": [
        Case(3, 3, 1, 136, MASKS),
        Case(9, 3, 1, 160, ("state",)),
        *(Case(2, 2, 1, D, ("state",)) for D in (264, 520, 1048)),
        *(Case(49, 2, 1, 712, options) for options in (("state",), MASKS)),
        Case(97, 2, 1, 712, ("state",)),
    ],
    "cluster": [
        Case(3, 3, 1, 136, MASKS),
        Case(9, 3, 1, 160, ("state",)),
        *(Case(2, 2, 1, D, ("state",)) for D in (264, 392, 512)),
    ],
    "gemm": [
        Case(3, 3, 2, 40, MASKS),
        Case(17, 3, 1, 136, ("state",)),
        Case(9, 1, 1, 136, ()),
    ],
    "batch": [
        Case(3, 3, 2, 40, MASKS),
        Case(130, 3, 1, 136, ("state",)),
        Case(2100, 2, 1, 264, MASKS),  # larger tiles
    ],
    "fma": [
        *(Case(1, 3, 1, D, MASKS) for D in (16, 48, 96)),
        *(Case(140, 2, 1, D, MASKS) for D in (16, 48, 96)),
        *(
            Case(B, 2, 1, D, MASKS)
            for B, D in ((1, 104), (70, 104), (141, 104), (1, 136), (70, 136))
        ),
    ],
    "wide": [
        Case(1, 3, 1, 260, MASKS),
        Case(3, 3, 1, 264, MASKS),
        Case(11, 2, 2, 272, MASKS),
    ],
    "step": [
        Case(1, 1, 1, 16, ("state",)),
        Case(3, 3, 2, 40, MASKS),
        Case(6, 2, 1, 72, ("state",)),
        Case(17, 3, 1, 136, MASKS),
        Case(5, 2, 2, 13, ("state",)),
    ],
}
CLUSTER = [case for case in GRID if case.D <= 512]
HUGE = [Case(2, 4, 1, 2048, ("state",)), Case(2, 3, 1, 2104, ("state",)), Case(2, 3, 1, 2688, ())]
