// bind(op, otherwise): a function that calls a registered op, for the ops' own functionals. torch.ops takes any
// arguments in any order, looks the overload up and asks for overrides in Python; here positional arguments of just the
// schema's types go straight to the dispatcher, as those of PyTorch's own functions do. All others, subclasses of
// Tensor and calls under a torch function mode among them, go to `otherwise`, with the same arguments.
#include "bind.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

namespace
{

enum class Kind {
    TENSOR,
    OPTIONAL_TENSOR,
    INTEGER,
    OPTIONAL_INTEGER,
    FLOAT,
    BOOL,
    STRING,
    OPTIONAL_STRING,
    DTYPE,
    OPTIONAL_DTYPE,
    INTEGERS,
    OPTIONAL_INTEGERS,
    FLOATS,
    BOOLS
};

// An argument's type; `size` of a list that must have so many elements, for which one stands as well, else 0.
struct Type {
    Kind kind;
    int32_t size = 0;
};

struct BoundOp {
    c10::OperatorHandle op;
    std::vector<Type> types;
    py::object otherwise;
    std::string name;
    PyMethodDef method;
};

const char *const CAPSULE = "cuda_ops._C.BoundOp";

Type type_of(const c10::Argument &argument)
{
    using c10::TypeKind;
    const c10::TypePtr &type = argument.type();
    if (argument.real_type()->kind() == TypeKind::ScalarTypeType)
        return {Kind::DTYPE};
    if (const auto optional = argument.real_type()->cast<c10::OptionalType>();
        optional && optional->getElementType()->kind() == TypeKind::ScalarTypeType)
        return {Kind::OPTIONAL_DTYPE};
    const auto is_integer = [](TypeKind kind) { return kind == TypeKind::IntType || kind == TypeKind::SymIntType; };
    if (const auto optional = type->cast<c10::OptionalType>()) {
        if (optional->getElementType()->kind() == TypeKind::TensorType)
            return {Kind::OPTIONAL_TENSOR};
        if (is_integer(optional->getElementType()->kind()))
            return {Kind::OPTIONAL_INTEGER};
        if (optional->getElementType()->kind() == TypeKind::StringType)
            return {Kind::OPTIONAL_STRING};
        if (const auto list = optional->getElementType()->cast<c10::ListType>();
            list && is_integer(list->getElementType()->kind()))
            return {Kind::OPTIONAL_INTEGERS, argument.N().value_or(0)};
    }
    if (const auto list = type->cast<c10::ListType>()) {
        const TypeKind element = list->getElementType()->kind();
        const int32_t size = argument.N().value_or(0);
        if (is_integer(element))
            return {Kind::INTEGERS, size};
        if (element == TypeKind::FloatType)
            return {Kind::FLOATS, size};
        if (element == TypeKind::BoolType)
            return {Kind::BOOLS, size};
    }
    switch (type->kind()) {
    case TypeKind::TensorType:
        return {Kind::TENSOR};
    case TypeKind::IntType:
    case TypeKind::SymIntType:
        return {Kind::INTEGER};
    case TypeKind::FloatType:
        return {Kind::FLOAT};
    case TypeKind::BoolType:
        return {Kind::BOOL};
    case TypeKind::StringType:
        return {Kind::STRING};
    default:
        throw py::value_error("bind: an argument of type " + type->str() + " is not supported");
    }
}

bool integer(PyObject *object, int64_t &value)
{
    if (!PyLong_CheckExact(object))
        return false;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
}

bool number(PyObject *object, double &value)
{
    if (PyFloat_CheckExact(object)) {
        value = PyFloat_AS_DOUBLE(object);
        return true;
    }
    int64_t whole = 0;
    if (!integer(object, whole))
        return false;
    value = static_cast<double>(whole);
    return static_cast<int64_t>(value) == whole;
}

bool flag(PyObject *object, bool &value)
{
    value = object == Py_True;
    return value || object == Py_False;
}

// The elements of a tuple or list, each read by `read`; or one, for `count` that are the same.
template <typename T, typename Read>
bool list(PyObject *object, c10::List<T> &values, int32_t count, const Read &read)
{
    if (!PyTuple_CheckExact(object) && !PyList_CheckExact(object)) {
        T value{};
        if (count == 0 || !read(object, value))
            return false;
        values.reserve(static_cast<size_t>(count));
        for (int32_t i = 0; i < count; i++)
            values.push_back(value);
        return true;
    }
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    if (count != 0 && size != count)
        return false;
    values.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; i++) {
        T value{};
        if (!read(PySequence_Fast_GET_ITEM(object, i), value))
            return false;
        values.push_back(value);
    }
    return true;
}

// Pushes an argument; false if it is not of just this type.
bool push(torch::jit::Stack &stack, PyObject *object, Type type)
{
    switch (type.kind) {
    case Kind::OPTIONAL_TENSOR:
        if (object == Py_None) {
            stack.emplace_back();
            return true;
        }
        [[fallthrough]];
    case Kind::TENSOR:
        if (!THPVariable_CheckExact(object))
            return false;
        stack.emplace_back(THPVariable_Unpack(object));
        return true;
    case Kind::OPTIONAL_INTEGER:
        if (object == Py_None) {
            stack.emplace_back();
            return true;
        }
        [[fallthrough]];
    case Kind::INTEGER: {
        int64_t value = 0;
        if (!integer(object, value))
            return false;
        stack.emplace_back(value);
        return true;
    }
    case Kind::FLOAT: {
        double value = 0;
        if (!number(object, value))
            return false;
        stack.emplace_back(value);
        return true;
    }
    case Kind::BOOL: {
        bool value = false;
        if (!flag(object, value))
            return false;
        stack.emplace_back(value);
        return true;
    }
    case Kind::OPTIONAL_STRING:
        if (object == Py_None) {
            stack.emplace_back();
            return true;
        }
        [[fallthrough]];
    case Kind::STRING: {
        Py_ssize_t size = 0;
        const char *const text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
        if (text == nullptr) {
            PyErr_Clear();
            return false;
        }
        stack.emplace_back(std::string(text, static_cast<size_t>(size)));
        return true;
    }
    case Kind::OPTIONAL_DTYPE:
        if (object == Py_None) {
            stack.emplace_back();
            return true;
        }
        [[fallthrough]];
    case Kind::DTYPE:
        if (!THPDtype_Check(object))
            return false;
        stack.emplace_back(static_cast<int64_t>(reinterpret_cast<THPDtype *>(object)->scalar_type));
        return true;
    case Kind::OPTIONAL_INTEGERS:
        if (object == Py_None) {
            stack.emplace_back();
            return true;
        }
        [[fallthrough]];
    case Kind::INTEGERS: {
        c10::List<int64_t> values;
        if (!list(object, values, type.size, integer))
            return false;
        stack.emplace_back(std::move(values));
        return true;
    }
    case Kind::FLOATS: {
        c10::List<double> values;
        if (!list(object, values, type.size, number))
            return false;
        stack.emplace_back(std::move(values));
        return true;
    }
    case Kind::BOOLS: {
        c10::List<bool> values;
        if (!list(object, values, type.size, flag))
            return false;
        stack.emplace_back(std::move(values));
        return true;
    }
    }
    return false;
}

PyObject *call(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    const auto &bound = *static_cast<const BoundOp *>(PyCapsule_GetPointer(self, CAPSULE));
    torch::jit::Stack stack;
    bool fits = static_cast<size_t>(count) == bound.types.size() && !at::impl::torch_function_mode_enabled() &&
                !at::tracer::impl::is_dispatch_enabled();
    stack.reserve(bound.types.size());
    for (Py_ssize_t i = 0; fits && i < count; i++)
        fits = push(stack, arguments[i], bound.types[static_cast<size_t>(i)]);
    if (!fits)
        return PyObject_Vectorcall(bound.otherwise.ptr(), arguments, static_cast<size_t>(count), nullptr);
    {
        const py::gil_scoped_release released;
        bound.op.callBoxed(&stack);
    }
    if (stack.empty())
        Py_RETURN_NONE;
    if (stack.size() == 1)
        return THPVariable_Wrap(std::move(stack[0]).toTensor());
    py::tuple results(stack.size());
    for (size_t i = 0; i < stack.size(); i++)
        PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(stack[i]).toTensor()));
    return results.release().ptr();
    END_HANDLE_TH_ERRORS
}

} // namespace

py::object bind(const std::string &name, py::object otherwise)
{
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    auto bound = std::make_unique<BoundOp>(BoundOp{op, {}, std::move(otherwise), op.schema().name(), {}});
    for (const c10::Argument &argument : op.schema().arguments())
        bound->types.push_back(type_of(argument));
    for (const c10::Argument &result : op.schema().returns())
        if (result.type()->kind() != c10::TypeKind::TensorType)
            throw py::value_error("bind: a return of type " + result.type()->str() + " is not supported");
    bound->method = {bound->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                     METH_FASTCALL, "A registered op, called with positional arguments."};
    BoundOp *const pointer = bound.release();
    const py::capsule capsule(pointer, CAPSULE, [](void *p) { delete static_cast<BoundOp *>(p); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&pointer->method, capsule.ptr()));
}
