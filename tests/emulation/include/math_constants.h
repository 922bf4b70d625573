// CUDA's constants of this name.
#ifndef EMULATION_MATH_CONSTANTS_H
#define EMULATION_MATH_CONSTANTS_H

#define CUDART_INF_F __builtin_inff()
#define CUDART_INF __builtin_inf()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_NAN __builtin_nan("")

#endif
