// torch.func.vmap of the ops. One kernel serves all that have an implementation or derivatives. What is composed of
// other ops is composed under vmap too. An op that treats a batch like a part of its input says so beside its schema,
//
//     CUDA_OPS_VMAP(library, "softmax_forward", "input[1], dim");
//
// and is then called once. Such a rule names
//     <tensor>          which gets the batch as another first dimension; one without a batch is expanded. A list likewise.
//     <int> or <int[]>  which are dimensions of these tensors: one more where they count from the front; all, if none
//     <tensor>*         which gets the batch as a part of its first dimension
//     <SymInt[]>*       which are sizes, of which the first is multiplied by the batch's
//     random <float>    above which 0 the op draws random numbers; it is called for each slice, as vmap's randomness says
// A tensor takes part if it has [n] dimensions or more, [=n] exactly, or more than there are in the list [argument]. The
// returns have the batch where those tensors have it. Tensors that the rule does not name must have no batch. If " or "
// separates two rules, the first that fits is taken. Any other call, and any other op, goes slice by slice.
#pragma once

#include <torch/library.h>

#include <string>

namespace cuda_ops
{

// Registers the kernel for the op of that name, without the namespace, unless it is registered.
void register_vmap(torch::Library &library, const char *name);

// What the kernel is to know of the op's arguments.
void register_vmap_rule(torch::Library &library, const char *name, const std::string &rule);

} // namespace cuda_ops

#define CUDA_OPS_VMAP(library, name, rule) ::cuda_ops::register_vmap_rule(library, name, rule)
