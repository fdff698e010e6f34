// What Python sees of the compiled code. Nothing of Python is known anywhere else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "call.h"
#include "cpu/execute.h"
#include "cpu/switches.h"
#include "cpu/threads.h"
#include "cuda/execute.h"

namespace py = pybind11;

namespace ocnn_fused {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

Type type_of(const std::string& name) {
  if (name == "float64") return Type::kFloat64;
  if (name == "float32") return Type::kFloat32;
  if (name == "bfloat16") return Type::kBFloat16;
  if (name == "float16") return Type::kFloat16;
  throw std::invalid_argument("dtype must be float64, float32, bfloat16 or float16, got " + name);
}

std::unique_ptr<Bucket> make_bucket(decltype(Bucket::plan) plan, Address tables, Address constants,
                                    const std::string& dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                                    std::vector<int64_t> grad_strides, std::vector<int64_t> places) {
  require(sizes.size() >= 2, "weight must have at least 2 dimensions, got " + std::to_string(sizes.size()));
  require(strides.size() == sizes.size() && grad_strides.size() == sizes.size(),
          "strides and grad_strides must be as many as sizes");
  for (const int64_t size : sizes) require(size > 0, "weight must not be empty");
  for (const int64_t place : places) require(place >= 0, "places must not be negative");
  require(!places.empty(), "places must not be empty");
  const int64_t groups = std::visit([](const auto& any) { return any.groups; }, plan);
  require(groups > 0 && sizes[0] % groups == 0,
          "groups must divide weight.size(0) = " + std::to_string(sizes[0]) + ", got " + std::to_string(groups));
  return std::unique_ptr<Bucket>(new Bucket{std::move(plan),
                                            reinterpret_cast<const int64_t*>(tables),
                                            reinterpret_cast<const void*>(constants),
                                            type_of(dtype),
                                            {sizes, std::move(strides)},
                                            {sizes, std::move(grad_strides)},
                                            std::move(places)});
}

Call make_call(const Bucket& bucket, const std::vector<Address>& weights, const std::vector<Address>& grads, bool adds,
               Address losses, bool wide, Address factors, double factor, bool per_target, Address workspace,
               int64_t workspace_bytes) {
  require(weights.size() == bucket.places.size(), "weights must be as many as places");
  require(grads.empty() || grads.size() == weights.size(), "grads must be as many as weights, or none");
  return {bucket,
          weights,
          grads,
          {reinterpret_cast<const double*>(factors), factor, per_target, adds},
          reinterpret_cast<void*>(losses),
          wide,
          {reinterpret_cast<char*>(workspace), workspace_bytes}};
}

// Queue: nothing for the CPU, a stream and cuBLAS for CUDA.
template <typename... Queue>
int64_t run(const Bucket& bucket, const std::vector<Address>& weights, const std::vector<Address>& grads, bool adds,
            Address losses, bool wide, Address factors, double factor, bool per_target, Address workspace,
            int64_t workspace_bytes, [[maybe_unused]] Queue... queue) {
  const Call call =
      make_call(bucket, weights, grads, adds, losses, wide, factors, factor, per_target, workspace, workspace_bytes);
  try {
    const py::gil_scoped_release others_may_run;
    if constexpr (sizeof...(queue) == 0) {
      cpu::execute(call);
    } else {
      cuda::execute(call, {queue...});
    }
  } catch (const WorkspaceTooSmall& error) {
    return error.needed;
  }
  return 0;
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

template <typename Struct, typename Value>
struct Field {
  const char* name;
  Value Struct::* member;
};

// A struct that Python makes by naming all of its fields.
template <typename Struct, typename... Values>
void bind_struct(py::module_& m, const char* name, const Field<Struct, Values>&... fields) {
  py::class_<Struct>(m, name).def(py::init([fields...](Values... values) {
                                    Struct result{};
                                    ((result.*fields.member = std::move(values)), ...);
                                    return result;
                                  }),
                                  py::kw_only(), py::arg(fields.name)...);
}

}  // namespace
}  // namespace ocnn_fused

PYBIND11_MODULE(_C, m) {
  using namespace ocnn_fused;
  using py::arg, py::kw_only;
  m.doc() = "Compiled backends of ocnn_fused: they know addresses, sizes and strides.";
  cpu::check_signals = check_signals;

  bind_struct<PlanAxis>(m, "PlanAxis", Field{"planes", &PlanAxis::planes}, Field{"taps", &PlanAxis::taps},
                        Field{"evaluation", &PlanAxis::evaluation}, Field{"outputs", &PlanAxis::outputs},
                        Field{"mix", &PlanAxis::mix});
  bind_struct<PlanPool>(m, "PlanPool", Field{"planes", &PlanPool::planes}, Field{"residues", &PlanPool::residues});
  bind_struct<PlanBlock>(m, "PlanBlock", Field{"pool", &PlanBlock::pool}, Field{"planes", &PlanBlock::planes},
                         Field{"taps", &PlanBlock::taps}, Field{"residues", &PlanBlock::residues},
                         Field{"evaluation", &PlanBlock::evaluation}, Field{"axes", &PlanBlock::axes},
                         Field{"plane_of", &PlanBlock::plane_of}, Field{"outputs", &PlanBlock::outputs},
                         Field{"output_of", &PlanBlock::output_of}, Field{"output_kind", &PlanBlock::output_kind},
                         Field{"lags", &PlanBlock::lags}, Field{"lag_of", &PlanBlock::lag_of},
                         Field{"sources", &PlanBlock::sources});
  bind_struct<PlanRun>(m, "PlanRun", Field{"pool", &PlanRun::pool}, Field{"left", &PlanRun::left},
                       Field{"right", &PlanRun::right}, Field{"out", &PlanRun::out}, Field{"count", &PlanRun::count},
                       Field{"summed", &PlanRun::summed});
  bind_struct<BilinearPlan>(
      m, "BilinearPlan", Field{"groups", &BilinearPlan::groups}, Field{"column", &BilinearPlan::column},
      Field{"flat", &BilinearPlan::flat}, Field{"outputs", &BilinearPlan::outputs}, Field{"lags", &BilinearPlan::lags},
      Field{"offset", &BilinearPlan::offset}, Field{"target", &BilinearPlan::target},
      Field{"symmetric", &BilinearPlan::symmetric}, Field{"antisymmetric", &BilinearPlan::antisymmetric},
      Field{"symmetric_t", &BilinearPlan::symmetric_t}, Field{"antisymmetric_t", &BilinearPlan::antisymmetric_t},
      Field{"pools", &BilinearPlan::pools}, Field{"blocks", &BilinearPlan::blocks}, Field{"runs", &BilinearPlan::runs});
  bind_struct<SmallPlan>(m, "SmallPlan", Field{"groups", &SmallPlan::groups}, Field{"taps", &SmallPlan::taps},
                         Field{"lags", &SmallPlan::lags}, Field{"pairs", &SmallPlan::pairs},
                         Field{"target", &SmallPlan::target}, Field{"left", &SmallPlan::left},
                         Field{"right", &SmallPlan::right}, Field{"lag_begin", &SmallPlan::lag_begin},
                         Field{"terms", &SmallPlan::terms}, Field{"tap_begin", &SmallPlan::tap_begin});
  bind_struct<FourierPlanAxis>(m, "FourierPlanAxis", Field{"axis", &FourierPlanAxis::axis},
                               Field{"taps", &FourierPlanAxis::taps}, Field{"step", &FourierPlanAxis::step},
                               Field{"cosine", &FourierPlanAxis::cosine}, Field{"sine", &FourierPlanAxis::sine});
  bind_struct<FourierPlan>(
      m, "FourierPlan", Field{"groups", &FourierPlan::groups}, Field{"column", &FourierPlan::column},
      Field{"offset", &FourierPlan::offset}, Field{"target", &FourierPlan::target}, Field{"axes", &FourierPlan::axes},
      Field{"cosine", &FourierPlan::cosine}, Field{"sine", &FourierPlan::sine},
      Field{"cosine_back", &FourierPlan::cosine_back}, Field{"sine_back", &FourierPlan::sine_back});

  py::class_<Bucket>(m, "Bucket")
      .def(py::init(&make_bucket), kw_only(), arg("plan"), arg("tables"), arg("constants"), arg("dtype"), arg("sizes"),
           arg("strides"), arg("grad_strides"), arg("places"))
#if defined(OCNN_FUSED_WITH_CUDA)
      .def("run_cuda", &run<Address, Address>, arg("weights"), arg("grads"), arg("adds"), arg("losses"), arg("wide"),
           arg("factors"), arg("factor"), arg("per_target"), arg("workspace"), arg("workspace_bytes"), arg("stream"),
           arg("blas"))
      .def("cuda_workspace_bytes", &cuda::workspace_bytes, arg("with_grad"))
#endif
      .def("run", &run<>, arg("weights"), arg("grads"), arg("adds"), arg("losses"), arg("wide"), arg("factors"),
           arg("factor"), arg("per_target"), arg("workspace"), arg("workspace_bytes"));

  m.def(
      "use_torch",
      [](Address parallel_for, Address num_threads, const std::string& cpu_capability) {
        require((parallel_for == 0) == (num_threads == 0), "parallel_for and num_threads must both be there, or none");
        cpu::torch = {reinterpret_cast<decltype(cpu::Torch::parallel_for)>(parallel_for),
                      reinterpret_cast<decltype(cpu::Torch::num_threads)>(num_threads)};
        cpu::choose_instruction_set(cpu_capability);
      },
      arg("parallel_for"), arg("num_threads"), arg("cpu_capability"));
  // Both return what was set before, see cpu/switches.h.
  m.def("use_panels", [](bool allowed) { return cpu::panels_allowed.exchange(allowed); });
  m.def("poison", [](bool wanted) { return cpu::poisons.exchange(wanted); });
#if defined(OCNN_FUSED_WITH_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}
