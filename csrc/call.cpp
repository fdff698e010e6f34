#include "call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

namespace ocnn_fused {
namespace {

using Tensors = std::vector<at::Tensor>;

LossesAndGrads execute(const Bucket& bucket, at::TensorList weights, const Scaling& scaling, at::TensorList targets) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ocnn_fused::execute", "")
                             .typed<LossesAndGrads(at::TensorList, const Plan&, bool, const std::optional<at::Tensor>&,
                                                   at::IntArrayRef, double, bool, at::TensorList)>();
  return op.call(weights, bucket.plan, bucket.with_grad, scaling.factors, bucket.members, scaling.factor,
                 scaling.per_target, targets);
}

double value_of(const at::Tensor& loss) {
  return loss.scalar_type() == at::kDouble ? *loss.const_data_ptr<double>() : *loss.const_data_ptr<float>();
}

}  // namespace

LossesAndGrads Call::losses_and_grads(const Tensors& weights, const Scaling& scaling) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (buckets.size() == 1 && buckets[0].with_grad && scaling.targets.empty()) {
    return execute(buckets[0], weights, scaling, {});
  }
  Tensors losses(weights.size()), grads(scaling.targets.empty() ? weights.size() : 0);
  for (const Bucket& bucket : buckets) {
    Tensors some, targets;
    for (const int64_t member : bucket.members) {
      some.push_back(weights.at(member));
      if (bucket.with_grad && !scaling.targets.empty()) targets.push_back(scaling.targets.at(member));
    }
    const bool direct = targets.empty() || are_targets(targets, some);
    auto [some_losses, some_grads] = execute(bucket, some, scaling, direct ? targets : Tensors());
    for (size_t s = 0; s < some.size(); ++s) losses[bucket.members[s]] = some_losses[s];
    for (size_t t = 0; t < targets.size(); ++t) {
      if (!direct) targets[t].add_(some_grads[t]);
      if (!targets[t].is_inference()) targets[t].unsafeGetTensorImpl()->bump_version();  // autograd must know
    }
    for (size_t s = 0; scaling.targets.empty() && s < some.size(); ++s) {
      grads[bucket.members[s]] = bucket.with_grad ? some_grads[s] : at::empty({0}, some[s].options());
    }
  }
  return {std::move(losses), std::move(grads)};
}

bool Call::with_grad() const {
  return std::any_of(buckets.begin(), buckets.end(), [](const Bucket& bucket) { return bucket.with_grad; });
}

Tensors Call::attached(const Tensors& weights) const {
  auto [losses, grads] = losses_and_grads(weights, {});
  if (!with_grad()) return std::move(losses);
  return attach(weights, std::move(losses), std::move(grads), geometry);
}

std::tuple<at::Tensor, at::Tensor> Call::total(const Tensors& weights, const at::Tensor& factors, double factor,
                                               const std::optional<at::Tensor>& least) const {
  auto [losses, grads] = losses_and_grads(weights, {factors, factor, false, {}});
  const int64_t count = static_cast<int64_t>(weights.size());
  const auto is_wide = [](const at::Tensor& loss) { return loss.scalar_type() == at::kDouble; };
  const at::ScalarType type = std::any_of(losses.begin(), losses.end(), is_wide) ? at::kDouble : at::kFloat;
  const auto options = losses[0].options().dtype(type);
  at::Tensor sum, stacked;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (weights[0].is_cpu()) {  // without a call for every step
      const double *of_weights = factors.const_data_ptr<double>(),
                   *from = least ? least->const_data_ptr<double>() : nullptr;
      stacked = at::empty({count}, options);
      sum = at::empty({}, options);
      double value = 0;
      for (int64_t w = 0; w < count; ++w) {
        const double loss = value_of(losses[w]);
        value += of_weights[w] * (from == nullptr ? loss : loss - from[w]);
        store_number(stacked, w, loss);
      }
      store_number(sum, 0, value * factor);
    } else {
      for (at::Tensor& loss : losses) loss = loss.to(type);
      stacked = at::stack(losses);
      const at::Tensor wide = stacked.to(at::kDouble);
      sum = at::dot(least ? wide.sub(*least) : wide, factors).mul_(factor).to(type);
    }
  }
  if (!with_grad()) return {std::move(sum), std::move(stacked)};
  return {attach_total(weights, std::move(sum), std::move(grads), geometry, factors, factor), std::move(stacked)};
}

}  // namespace ocnn_fused
