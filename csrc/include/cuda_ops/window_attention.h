/* window_attention: attention among the pixels of each window of images whose channels are innermost, read and written
 * where they lie: without a copy of the windows, and without one of the images rolled.
 *
 *     output[i] = sum over j of softmax_j(scale * query[i] . key[j] + bias[head][i][j] + apart(i, j)) * value[j]
 *
 *   qkv:    [images, height, width, 3, heads, head_dim]; query, key and value of a pixel lie behind each other
 *   output: [images, height, width, heads, head_dim]
 *   bias:   [heads, positions, positions], of float beside float, fp16 and bf16, double beside double; NULL: none.
 *           positions: window_height * window_width, at most CUDA_OPS_WINDOW_POSITIONS
 *   A window has the pixels of window_height rows and window_width columns, which divide height and width: those next to
 *       each other, or, where `grid`, every height / window_height-th row and width / window_width-th column.
 *   shift_y, shift_x: the image counts as rolled by as many rows and columns, up and to the left; in [0, window). Where
 *       a window then has pixels of opposite edges, apart(i, j) is -100 for those of different ones, and 0 else. Not
 *       with `grid`.
 *   backward: grad_qkv like qkv, grad_bias like bias; grad_bias may be NULL, not wanted.
 *
 * Results repeat bitwise.
 */
#ifndef CUDA_OPS_WINDOW_ATTENTION_H
#define CUDA_OPS_WINDOW_ATTENTION_H

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_WINDOW_POSITIONS = 1024 };
/* Added to scores of pixels that do not lie side by side. */
#define CUDA_OPS_WINDOW_APART (-100)

typedef struct cuda_ops_windows {
    int64_t images, height, width, heads, head_dim, window_height, window_width, shift_y, shift_x;
    int grid;
    double scale;
} cuda_ops_windows;

CUDA_OPS_HOST_DEVICE int64_t cuda_ops_window_positions(const cuda_ops_windows *w)
{
    return w->window_height * w->window_width;
}
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_window_count(const cuda_ops_windows *w)
{
    return w->images * (w->height / w->window_height) * (w->width / w->window_width);
}

/* A window: the number of its image's first pixel, its first row and column in the rolled image, and whether it has
 * pixels of opposite edges, which positions from edge_y or edge_x on belong to. */
typedef struct cuda_ops_window {
    int64_t image, y, x, edge_y, edge_x;
} cuda_ops_window;

CUDA_OPS_HOST_DEVICE cuda_ops_window cuda_ops_window_at(const cuda_ops_windows *w, int64_t number)
{
    const int64_t down = w->height / w->window_height, across = w->width / w->window_width;
    const int64_t row = number / across, n = row / down;
    const int64_t y = row - n * down, x = number - row * across;
    cuda_ops_window window;
    window.image = n * w->height * w->width;
    window.y = w->grid ? y : y * w->window_height;
    window.x = w->grid ? x : x * w->window_width;
    window.edge_y = y == down - 1 ? w->window_height - w->shift_y : w->window_height;
    window.edge_x = x == across - 1 ? w->window_width - w->shift_x : w->window_width;
    return window;
}

/* The number of the pixel at row `y` and column `x` of a window. */
CUDA_OPS_HOST_DEVICE int64_t cuda_ops_window_pixel(const cuda_ops_windows *w, const cuda_ops_window *window, int64_t y,
                                                   int64_t x)
{
    int64_t row = window->y + (w->grid ? y * (w->height / w->window_height) : y) + w->shift_y;
    int64_t column = window->x + (w->grid ? x * (w->width / w->window_width) : x) + w->shift_x;
    row -= row >= w->height ? w->height : 0;
    column -= column >= w->width ? w->width : 0;
    return window->image + row * w->width + column;
}

/* Which of its window's edges a position lies beyond: pixels whose are not the same ones are apart. */
CUDA_OPS_HOST_DEVICE int cuda_ops_window_part(const cuda_ops_window *window, int64_t y, int64_t x)
{
    return (y >= window->edge_y) + 2 * (x >= window->edge_x);
}

/* Units [begin, end) of windows * heads, a window's heads behind each other. */
cuda_ops_status cuda_ops_window_attention_forward_cpu(void *output, const void *qkv, const void *bias,
                                                      const cuda_ops_windows *windows, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype);
/* Units [begin, end) of chunks * heads, a chunk's heads behind each other: chunk c has the windows from
 * c * count / chunks on. partials: [chunks, heads, positions, positions], whose sum over chunks is grad_bias; NULL: not
 * wanted. */
cuda_ops_status cuda_ops_window_attention_backward_cpu(void *grad_qkv, void *partials, const void *grad_output,
                                                       const void *qkv, const void *bias,
                                                       const cuda_ops_windows *windows, int64_t chunks, int64_t begin,
                                                       int64_t end, cuda_ops_dtype dtype);

cuda_ops_status cuda_ops_window_attention_forward_cuda(void *output, const void *qkv, const void *bias,
                                                       const cuda_ops_windows *windows, cuda_ops_dtype dtype,
                                                       cuda_ops_stream stream);
/* Bytes that backward needs, aligned to 16. */
int64_t cuda_ops_window_attention_workspace_cuda(const cuda_ops_windows *windows, int with_grad_bias,
                                                 cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_window_attention_backward_cuda(void *grad_qkv, void *grad_bias, void *workspace,
                                                        const void *grad_output, const void *qkv, const void *bias,
                                                        const cuda_ops_windows *windows, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream);
/* paths.h */
int cuda_ops_window_attention_paths_cuda(cuda_ops_path_report *reports, int room, int backward,
                                         const cuda_ops_windows *windows, cuda_ops_dtype dtype,
                                         const cuda_ops_device_facts *device);

#ifdef __cplusplus
}
#endif

#endif
