// The copies of gemm's padded path: one or two operands of 2 or 4 bytes, of any shape, pitch, stride and address.
#include "cases.h"
#include "gemm/align.h"

using namespace emulation;

struct Operand {
    AlignedCopy copy;
    unsigned char *from, *to;
};

static Operand operand()
{
    Operand operand = {};
    AlignedCopy &copy = operand.copy;
    copy.size = one_in(2) ? 2 : 4;
    copy.transposes = copy.size == 4 && one_in(2);
    copy.rows = random_size(70), copy.columns = random_size(300), copy.matrices = one_in(2) ? 1 : random_in(2, 4);
    copy.pitch = copy.columns + (one_in(2) ? 0 : random_in(1, 20));
    copy.stride = copy.matrices == 1 ? 0 : copy.rows * copy.pitch + (one_in(2) ? 0 : random_in(1, 20));
    const int64_t count = (copy.matrices - 1) * copy.stride + (copy.rows - 1) * copy.pitch + copy.columns;
    operand.from = (unsigned char *)device_memory((size_t)(count * copy.size), random_phase(copy.size));
    for (int64_t i = 0; i < count * copy.size; i++)
        operand.from[i] = (unsigned char)random_below(256);
    operand.to = (unsigned char *)device_memory((size_t)aligned_copy_bytes(copy), 0);
    copy.from = operand.from, copy.to = operand.to;
    return operand;
}

static void check(const Operand &operand)
{
    const AlignedCopy &copy = operand.copy;
    const int64_t pitch = aligned_copy_pitch(copy), lines = copy.transposes ? copy.columns : copy.rows;
    if (pitch * copy.size % 16 != 0)
        fail("a pitch of %lld", (long long)pitch);
    // Whole lines of 128 bytes where they add an eighth at most, and never more than that beside the last 16 bytes.
    const int64_t row = (copy.transposes ? copy.rows : copy.columns) * copy.size, added = pitch * copy.size - row;
    const int64_t to_lines = (row + 127) / 128 * 128 - row;
    if (added < 0 || (added > 15 && added * 8 > row) || (to_lines * 8 <= row && added != to_lines))
        fail("a pitch of %lld for rows of %lld bytes", (long long)pitch, (long long)row);
    for (int64_t matrix = 0; matrix < copy.matrices; matrix++)
        for (int64_t row = 0; row < copy.rows; row++)
            for (int64_t column = 0; column < copy.columns; column++) {
                const int64_t at = copy.transposes ? column * pitch + row : row * pitch + column;
                if (memcmp(operand.to + (matrix * lines * pitch + at) * copy.size,
                           operand.from + (matrix * copy.stride + row * copy.pitch + column) * copy.size,
                           (size_t)copy.size) != 0)
                    fail("element %lld, %lld of matrix %lld is wrong", (long long)row, (long long)column,
                         (long long)matrix);
            }
}

static void align(int64_t number)
{
    const Operand operands[] = {operand(), operand()};
    const AlignedCopy copies[] = {operands[0].copy, operands[1].copy};
    const int count = (int)random_in(1, 2);
    const AlignedCopy &first = copies[0], &last = copies[count - 1];
    describe("case %lld: %lld x %lld x %lld of %d bytes%s, %lld x %lld x %lld of %d bytes%s", (long long)number,
             (long long)first.matrices, (long long)first.rows, (long long)first.columns, first.size,
             first.transposes ? " transposed" : "", (long long)last.matrices, (long long)last.rows,
             (long long)last.columns, last.size, last.transposes ? " transposed" : "");
    expect_success(copy_aligned(copies, count, nullptr));
    for (int i = 0; i < count; i++)
        check(operands[i]);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "gemm_align", align);
}
