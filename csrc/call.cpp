#include "call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace ocnn_fused {
namespace {

LossesAndGrads execute(const Bucket& bucket, at::TensorList weights) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ocnn_fused::execute", "")
                             .typed<LossesAndGrads(at::TensorList, const Plan&, bool)>();
  return op.call(weights, bucket.plan, bucket.with_grad);
}

}  // namespace

LossesAndGrads Call::losses_and_grads(const std::vector<at::Tensor>& weights) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (buckets.size() == 1 && buckets[0].with_grad) return execute(buckets[0], weights);
  std::vector<at::Tensor> losses(weights.size()), grads(weights.size());
  for (const Bucket& bucket : buckets) {
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

std::vector<at::Tensor> Call::attached(const std::vector<at::Tensor>& weights) const {
  auto [losses, grads] = losses_and_grads(weights);
  const auto wanted = [](const Bucket& bucket) { return bucket.with_grad; };
  if (std::none_of(buckets.begin(), buckets.end(), wanted)) return std::move(losses);
  return attach(weights, std::move(losses), std::move(grads), geometry);
}

}  // namespace ocnn_fused
