# mypy: ignore-errors
"""Triton kernels of stacked convolutions; imported only where there is Triton. See `implicit`.

One program forms a tile of the result of one client g. With places n = (image, row, column) and k = (tap,
channel), each is a product whose factors are read where they lie:

    product          y[o, n] = Σ_k w[o, k] x[k, n]        x shifted by the tap, zero outside of the image
    rows             the same for kernels of three rows: a program goes down the rows of its images, reads
                     each once for every column of taps, and adds to the three rows of y that see it
    weight_gradient  ∂w[(j, c), (i, o)] = Σ_n x[c, n + j] ∂y[o, n - i]

Tiles are read as [places, channels]: where neither is contiguous, as with a stride, Triton lets neighbouring
threads read along the first. Places that no image has are masked. Addresses are 64-bit where a tile begins,
and 32-bit within it.
"""

import triton
import triton.language as tl


@triton.jit
def product(
    x,
    taps,
    y,
    places,  # in all images, of one class
    stride_x,  # from image to image
    stride_y,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    H: tl.constexpr,  # of x
    W: tl.constexpr,
    X_CHANNEL: tl.constexpr,  # strides of x
    X_ROW: tl.constexpr,
    X_COLUMN: tl.constexpr,
    Y_H: tl.constexpr,
    Y_W: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TAP_OUT: tl.constexpr,  # strides of the taps
    TAP_IN: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLACES_FIRST: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = w x, or the gradient with respect to x of such a product where GRADIENT.

    The gradient of a convolution with a stride falls into classes of places by their remainder, which see
    other taps each: i = i0 + STRIDE·t.
    """
    CLASSES: tl.constexpr = STRIDE if GRADIENT else 1
    A_H: tl.constexpr = (Y_H + CLASSES - 1) // CLASSES
    A_W: tl.constexpr = (Y_W + CLASSES - 1) // CLASSES
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    block = tl.program_id(0) // OUT_BLOCKS
    o = tl.program_id(0) % OUT_BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    g = tl.program_id(1).to(tl.int64)
    kind = tl.program_id(2)

    p = block * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    exists = p < places
    a_w = p % A_W
    a_h = p // A_W % A_H
    from_image = block * BLOCK_PLACES // (A_W * A_H)
    image = p // (A_W * A_H) - from_image
    x += g * IN * X_CHANNEL + from_image.to(tl.int64) * stride_x
    y += g * (OUT * Y_H * Y_W) + from_image.to(tl.int64) * stride_y

    if GRADIENT:
        rest_h = kind // CLASSES
        rest_w = kind % CLASSES
        first_h = (rest_h + PAD_H) % CLASSES
        first_w = (rest_w + PAD_W) % CLASSES
        count_h = (KH - first_h + CLASSES - 1) // CLASSES
        count_w = (KW - first_w + CLASSES - 1) // CLASSES
        row = a_h + (rest_h + PAD_H - first_h) // CLASSES
        column = a_w + (rest_w + PAD_W - first_w) // CLASSES
        y_row = a_h * CLASSES + rest_h
        y_column = a_w * CLASSES + rest_w
    else:
        first_h = 0
        first_w = 0
        count_h = KH
        count_w = KW
        row = a_h * STRIDE - PAD_H
        column = a_w * STRIDE - PAD_W
        y_row = a_h
        y_column = a_w
    SIGN: tl.constexpr = -1 if GRADIENT else 1

    taps += g * KH * KW * IN * OUT
    from_x = image * stride_x + row * X_ROW + column * X_COLUMN
    BY_TAP: tl.constexpr = IN % BLOCK_K == 0
    within = tl.arange(0, BLOCK_K)

    if PLACES_FIRST:
        total = tl.zeros((BLOCK_PLACES, BLOCK_OUT), tl.float32)
    else:
        total = tl.zeros((BLOCK_OUT, BLOCK_PLACES), tl.float32)
    if UNROLL:  # only where the number of taps is known
        for step in tl.static_range(0, (KH * KW * IN + BLOCK_K - 1) // BLOCK_K):
            if BY_TAP:
                t = step * BLOCK_K // IN
                c = step * BLOCK_K % IN + within
                t_h, t_w = t // KW, t % KW
                inside = (row + SIGN * t_h >= 0) & (row + SIGN * t_h < H) & exists
                inside = (inside & (column + SIGN * t_w >= 0) & (column + SIGN * t_w < W))[:, None]
                shift = c * X_CHANNEL + SIGN * (t_h * X_ROW + t_w * X_COLUMN)
                tap = t * IN * OUT + c * TAP_IN
                known = (o < OUT)[:, None]
            else:
                k = step * BLOCK_K + within
                t = k // IN
                c = k % IN
                t_h, t_w = t // KW, t % KW
                rows = row[:, None] + SIGN * t_h[None, :]
                columns = column[:, None] + SIGN * t_w[None, :]
                inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
                inside = inside & exists[:, None] & (t < KH * KW)[None, :]
                shift = c * X_CHANNEL + SIGN * (t_h * X_ROW + t_w * X_COLUMN)
                tap = t * IN * OUT + c * TAP_IN
                known = (o < OUT)[:, None] & (t < KH * KW)[None, :]
            seen = tl.load(x + (from_x[:, None] + shift[None, :]), mask=inside, other=0.0)
            w = tl.load(taps + (o * TAP_OUT)[:, None] + tap[None, :], mask=known, other=0.0)
            if PLACES_FIRST:
                total = tl.dot(seen, tl.trans(w), total, input_precision=PRECISION)
            else:
                total = tl.dot(w, tl.trans(seen), total, input_precision=PRECISION)
    else:
        steps = (count_h * count_w * IN + BLOCK_K - 1) // BLOCK_K
        for step in tl.range(0, steps, num_stages=STAGES):
            if BY_TAP:
                t = step // (IN // BLOCK_K)
                c = step % (IN // BLOCK_K) * BLOCK_K + within
                t_h, t_w = t // count_w, t % count_w
                inside = (row + SIGN * t_h >= 0) & (row + SIGN * t_h < H) & exists
                inside = (inside & (column + SIGN * t_w >= 0) & (column + SIGN * t_w < W))[:, None]
                shift = c * X_CHANNEL + SIGN * (t_h * X_ROW + t_w * X_COLUMN)
                which = (first_h + CLASSES * t_h) * KW + first_w + CLASSES * t_w
                tap = which * (IN * OUT) + c * TAP_IN
                known = (o < OUT)[:, None]
            else:
                k = step * BLOCK_K + within
                t = k // IN
                c = k % IN
                t_h, t_w = t // count_w, t % count_w
                rows = row[:, None] + SIGN * t_h[None, :]
                columns = column[:, None] + SIGN * t_w[None, :]
                inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
                inside = inside & exists[:, None] & (t_h < count_h)[None, :]
                shift = c * X_CHANNEL + SIGN * (t_h * X_ROW + t_w * X_COLUMN)
                which = (first_h + CLASSES * t_h) * KW + first_w + CLASSES * t_w
                tap = which * (IN * OUT) + c * TAP_IN
                known = (o < OUT)[:, None] & (t_h < count_h)[None, :]
            seen = tl.load(x + (from_x[:, None] + shift[None, :]), mask=inside, other=0.0)
            w = tl.load(taps + (o * TAP_OUT)[:, None] + tap[None, :], mask=known, other=0.0)
            if PLACES_FIRST:
                total = tl.dot(seen, tl.trans(w), total, input_precision=PRECISION)
            else:
                total = tl.dot(w, tl.trans(seen), total, input_precision=PRECISION)

    if not PLACES_FIRST:
        total = tl.trans(total)
    exists = exists & (y_row < Y_H) & (y_column < Y_W)
    to = (image * stride_y + y_row * Y_W + y_column)[:, None] + (o * (Y_H * Y_W))[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=exists[:, None] & (o < OUT)[None, :])


@triton.jit
def _tap(taps, o, c, t, IN: tl.constexpr, OUT: tl.constexpr, TAP_OUT: tl.constexpr, TAP_IN: tl.constexpr):
    at = taps + t * (IN * OUT) + (o * TAP_OUT)[:, None] + (c * TAP_IN)[None, :]
    return tl.load(at, mask=(o < OUT)[:, None] & (c < IN)[None, :], other=0.0)


@triton.jit
def rows(
    x,
    taps,
    y,
    lines,  # columns of all images
    stride_x,
    stride_y,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    X_CHANNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    X_COLUMN: tl.constexpr,
    Y_H: tl.constexpr,
    Y_W: tl.constexpr,
    TAP_OUT: tl.constexpr,
    TAP_IN: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLIP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = w x for kernels of 3×3 and no stride; with the taps in reverse order where FLIP.

    All taps stay in registers. A row of x adds to three rows of y, of which the first is complete then.
    """
    SEGMENTS: tl.constexpr = (Y_H + ROWS - 1) // ROWS
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    o = tl.program_id(0) % OUT_BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    start = tl.program_id(0) // OUT_BLOCKS % SEGMENTS * ROWS
    from_line = tl.program_id(0) // (OUT_BLOCKS * SEGMENTS) * BLOCK_PLACES
    p = from_line + tl.arange(0, BLOCK_PLACES)
    g = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_IN)

    exists = p < lines
    y_column = p % Y_W
    from_image = from_line // Y_W
    image = p // Y_W - from_image
    column = y_column - PAD_W

    x += g * IN * X_CHANNEL + from_image.to(tl.int64) * stride_x
    y += g * (OUT * Y_H * Y_W) + from_image.to(tl.int64) * stride_y
    taps += g * 9 * IN * OUT
    R: tl.constexpr = 8 if FLIP else 0
    S: tl.constexpr = -1 if FLIP else 1
    w0 = _tap(taps, o, c, R, IN, OUT, TAP_OUT, TAP_IN)
    w1 = _tap(taps, o, c, R + S, IN, OUT, TAP_OUT, TAP_IN)
    w2 = _tap(taps, o, c, R + S * 2, IN, OUT, TAP_OUT, TAP_IN)
    w3 = _tap(taps, o, c, R + S * 3, IN, OUT, TAP_OUT, TAP_IN)
    w4 = _tap(taps, o, c, R + S * 4, IN, OUT, TAP_OUT, TAP_IN)
    w5 = _tap(taps, o, c, R + S * 5, IN, OUT, TAP_OUT, TAP_IN)
    w6 = _tap(taps, o, c, R + S * 6, IN, OUT, TAP_OUT, TAP_IN)
    w7 = _tap(taps, o, c, R + S * 7, IN, OUT, TAP_OUT, TAP_IN)
    w8 = _tap(taps, o, c, R + S * 8, IN, OUT, TAP_OUT, TAP_IN)

    left = exists & (column >= 0) & (column < W)
    middle = exists & (column + 1 >= 0) & (column + 1 < W)
    right = exists & (column + 2 >= 0) & (column + 2 < W)
    known = (c < IN)[None, :]
    from_x = (image * stride_x + column * X_COLUMN)[:, None] + (c * X_CHANNEL)[None, :]
    to = (image * stride_y + y_column)[:, None] + (o * (Y_H * Y_W))[None, :]
    keep = exists[:, None] & (o < OUT)[None, :]

    first = tl.zeros((BLOCK_OUT, BLOCK_PLACES), tl.float32)
    second = tl.zeros((BLOCK_OUT, BLOCK_PLACES), tl.float32)
    for q in tl.range(0, ROWS + 2, num_stages=STAGES):
        row = start + q - PAD_H
        inside = known & (row >= 0) & (row < H)
        at = x + row * X_ROW + from_x
        x0 = tl.load(at, mask=inside & left[:, None], other=0.0)
        x1 = tl.load(at + X_COLUMN, mask=inside & middle[:, None], other=0.0)
        x2 = tl.load(at + 2 * X_COLUMN, mask=inside & right[:, None], other=0.0)
        x0, x1, x2 = tl.trans(x0), tl.trans(x1), tl.trans(x2)
        third = tl.zeros((BLOCK_OUT, BLOCK_PLACES), tl.float32)
        first = tl.dot(w6, x0, first, input_precision=PRECISION)
        second = tl.dot(w3, x0, second, input_precision=PRECISION)
        third = tl.dot(w0, x0, third, input_precision=PRECISION)
        first = tl.dot(w7, x1, first, input_precision=PRECISION)
        second = tl.dot(w4, x1, second, input_precision=PRECISION)
        third = tl.dot(w1, x1, third, input_precision=PRECISION)
        first = tl.dot(w8, x2, first, input_precision=PRECISION)
        second = tl.dot(w5, x2, second, input_precision=PRECISION)
        third = tl.dot(w2, x2, third, input_precision=PRECISION)
        y_row = start + q - 2
        done = tl.trans(first).to(y.dtype.element_ty)
        tl.store(y + y_row * Y_W + to, done, mask=keep & (q >= 2) & (y_row < Y_H))
        first = second
        second = third


@triton.jit
def weight_gradient(
    x,
    dy,
    parts,  # [splits, clients, KH, KW, OUT, IN]
    places,
    chunk,  # places of one program
    groups,
    stride_x,
    stride_dy,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    X_CHANNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    X_COLUMN: tl.constexpr,
    Y_H: tl.constexpr,
    Y_W: tl.constexpr,
    DY_CHANNEL: tl.constexpr,
    DY_ROW: tl.constexpr,
    DY_COLUMN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a part of ∂w: the sum over a chunk of places.

    m = (tap, channel of x), n = channel of ∂y. Where SHIFTED (no stride) rows of taps belong to n: a place is
    one of x, and ∂y is shifted. Then the tile has more products for what is read.
    """
    ROWS: tl.constexpr = H if SHIFTED else Y_H
    M: tl.constexpr = KW * IN if SHIFTED else KH * KW * IN
    N: tl.constexpr = KH * OUT if SHIFTED else OUT
    N_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) // N_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % N_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    g = tl.program_id(2).to(tl.int64)

    c = m % IN
    j = m // IN % KW
    i_m = m // (IN * KW)
    o = n % OUT
    i_n = n // OUT
    x += g * IN * X_CHANNEL
    dy += g * OUT * DY_CHANNEL
    x_shift = c * X_CHANNEL + i_m * X_ROW + j * X_COLUMN
    dy_shift = o * DY_CHANNEL - i_n * DY_ROW

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    start = split * chunk
    stop = tl.minimum(start + chunk, places)
    for k0 in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        exists = k < stop
        y_column = k % Y_W
        q = k // Y_W % ROWS
        from_image = k0 // (Y_W * ROWS)
        image = k // (Y_W * ROWS) - from_image
        column = y_column * STRIDE - PAD_W
        if SHIFTED:
            row = q
            y_row = q + PAD_H
        else:
            row = q * STRIDE - PAD_H
            y_row = q
        columns = column[:, None] + j[None, :]
        inside = (columns >= 0) & (columns < W) & exists[:, None] & (m < M)[None, :]
        if not SHIFTED:
            down = row[:, None] + i_m[None, :]
            inside = inside & (down >= 0) & (down < H)
        at = (image * stride_x + row * X_ROW + column * X_COLUMN)[:, None] + x_shift[None, :]
        seen = tl.load(x + from_image.to(tl.int64) * stride_x + at, mask=inside, other=0.0)
        valid = exists[:, None] & (n < N)[None, :]
        if SHIFTED:
            up = y_row[:, None] - i_n[None, :]
            valid = valid & (up >= 0) & (up < Y_H)
        at = (image * stride_dy + y_row * DY_ROW + y_column * DY_COLUMN)[:, None] + dy_shift[None, :]
        given = tl.load(dy + from_image.to(tl.int64) * stride_dy + at, mask=valid, other=0.0)
        total = tl.dot(tl.trans(seen), given, total, input_precision=PRECISION)

    to = parts + (split * groups + g) * (KH * KW * OUT * IN)
    tap = (i_m[:, None] + i_n[None, :]) * KW + j[:, None]
    to = to + tap * (OUT * IN) + (o * IN)[None, :] + c[:, None]
    tl.store(to, total, mask=(m < M)[:, None] & (n < N)[None, :])
