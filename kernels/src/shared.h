// How Python holds what operations share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace native {

/// What an object of Python is of a T.
///
/// An operation that is given one shares the T and not the object.  With nanobind's own conversion it would keep
/// the object, and take the interpreter's lock to give it back: on the thread that computes, which would wait there
/// for whatever runs in Python.
template <typename T>
struct Shared {
  std::shared_ptr<T> value;
};

}  // namespace native

namespace nanobind::detail {

/// In place of that of nanobind/stl/shared_ptr.h.
template <typename T>
struct type_caster<std::shared_ptr<T>> {
  using Object = native::Shared<std::remove_const_t<T>>;
  NB_TYPE_CASTER(std::shared_ptr<T>, make_caster<Object>::Name)

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Object> caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    const Object* object = caster.operator Object*();
    value = object ? object->value : nullptr;
    return true;
  }

  /// Python knows no const: what it is given was not made as one.
  static handle from_cpp(std::shared_ptr<T> value, rv_policy, cleanup_list* cleanup) noexcept {
    Object object{std::const_pointer_cast<std::remove_const_t<T>>(std::move(value))};
    return make_caster<Object>::from_cpp(std::move(object), rv_policy::move, cleanup);
  }
};

}  // namespace nanobind::detail
