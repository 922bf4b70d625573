// Autograd of the ops. Beside its schema an op states its derivatives, as PyTorch's derivatives.yaml does:
//
//     library.def("square_forward(Tensor input) -> (Tensor output)");
//     CUDA_OPS_DERIVATIVES(library, "square_forward", {"input: square_backward(grad_output, input)"});
//
// reads: the gradient of `input` is the op square_backward of the gradient of `output` and of `input`. From these lines
// one kernel, which all ops share, records the graph and runs it backward, in C++, so that an eager call costs the host
// what one of PyTorch's own ops costs. Gradients are registered ops themselves: torch.compile sees through both
// directions, and an op whose gradients have derivatives of their own is differentiable as often as they are.
//
// A derivative is "<arguments>: <op>(<sources>)". The op, of cuda_ops unless it says `aten::`, returns one gradient for
// each of the arguments, or a list of those that are wanted. "<argument>: grad_<return>" passes the gradient on, which
// autograd itself sums up where the argument was broadcast. A source is
//     an argument or a return of the op            by its name in the schema
//     grad_<return>                                the gradient that comes in; the only return of an op that does not
//                                                  name it is `output`
//     wanted                                       bool[]: which of <arguments> have a gradient to be computed
//     wants_<argument>                             bool: whether that argument has
//     none, true, false, an integer, [true false ...]
//     <source> if <argument>                       None, and not saved, unless that one of <arguments> has a gradient
// and of a tensor, instead of its elements,
//     .size  .stride  .dtype                       that property; saved instead of the tensor
//     .plane                                       its last two sizes
//     .channels_last                               bool: whether that is the format that its strides suggest
//     .channels_last_1d                            likewise of (N, C, L), as an image of one row
//     .mT                                          the transposed matrix, a view
// Saved for backward is what the wanted gradients need, and nothing else; of an argument that the op writes into, a copy.
// A return that no derivative takes the gradient of is not differentiable. Where only some of the gradients that a
// derivative takes have come in, the others are None if the op takes that, else zeros.
//
// "<arguments>: <op>(<sources>) or <op>(<sources>)" is for a gradient that a fused op computes which has no derivatives
// itself: where gradients are recorded (create_graph), the second op is called instead, which composes them of ops that
// have.
//
// "<arguments>: not differentiable" makes it an error that they require grad, which else is not looked at.
//
// Forward mode: a line "<returns> <- <op>(<sources>)", in which one source or more is tangent_<argument>, adds what the
// tangents of those arguments give to the tangents of the returns. It is followed where one of them has a tangent; the
// others are None. An argument with a tangent and no line is an error. (`wanted` is then no word of this language.)
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <initializer_list>

namespace cuda_ops
{

// Which dtype torch.autocast gives an op's arguments, as PyTorch's lists of ops do.
enum class Autocast {
    LOWER_PRECISION, // all floating-point tensors but float64: to autocast's dtype
    INPUT_ONLY,      // the first tensor to autocast's dtype; the op takes float32 parameters beside it
    FLOAT32,         // all floating-point tensors but float64: to float32
    FLOAT32_ON_CUDA, // likewise, but on the CPU the op computes in the dtype that it is given
};

// Registers the op's derivatives. `name` without the namespace.
void register_derivatives(torch::Library &library, const char *name, std::initializer_list<const char *> derivatives);

// The registered op of that name ("cuda_ops::..."), to be called with the signature of the function that implements it.
// By way of the dispatcher, so that torch.compile and autograd see it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> registered_op(const char *name)
{
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// For gradients of fused ops, composite ops that use the fused kernel where nothing asks for the next derivative, and
// ops that can be differentiated otherwise: whether autograd records what is done with the tensors, or one of them has
// a tangent.
bool is_differentiated_further(at::TensorList tensors);

// Registers what torch.autocast casts. PyTorch's lists are not the same for both devices: on the CPU softmax, norms and
// sums of halves are halves.
void register_autocast(torch::Library &library, const char *name, Autocast policy);

} // namespace cuda_ops

#define CUDA_OPS_DERIVATIVES(library, name, ...) ::cuda_ops::register_derivatives(library, name, __VA_ARGS__)
#define CUDA_OPS_AUTOCAST(library, name, policy)                                                                       \
    ::cuda_ops::register_autocast(library, name, ::cuda_ops::Autocast::policy)
