#include "buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

namespace ocnn_fused {
namespace {

using LossesAndGrads = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>;
using ExecutePlan = LossesAndGrads(at::TensorList, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool);
using ExecuteSmall = LossesAndGrads(at::TensorList, const at::Tensor&, const at::Tensor&, bool);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

LossesAndGrads execute(const Bucket& bucket, at::TensorList weights) {
  static const auto plan = find<ExecutePlan>("ocnn_fused::execute_plan");
  static const auto small = find<ExecuteSmall>("ocnn_fused::execute_small");
  return bucket.constants ? plan.call(weights, bucket.layout, bucket.tables, *bucket.constants, bucket.with_grad)
                          : small.call(weights, bucket.layout, bucket.tables, bucket.with_grad);
}

}  // namespace

LossesAndGrads Buckets::run(const std::vector<at::Tensor>& weights) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (all.size() == 1 && all[0].with_grad) return execute(all[0], weights);
  std::vector<at::Tensor> losses(weights.size()), grads(weights.size());
  for (const Bucket& bucket : all) {
    std::vector<at::Tensor> some;
    for (const int64_t member : bucket.members) some.push_back(weights.at(member));
    const auto [some_losses, some_grads] = execute(bucket, some);
    for (size_t s = 0; s < some.size(); ++s) {
      losses[bucket.members[s]] = some_losses[s];
      grads[bucket.members[s]] = bucket.with_grad ? some_grads[s] : at::empty({0}, some[s].options());
    }
  }
  return {std::move(losses), std::move(grads)};
}

}  // namespace ocnn_fused
