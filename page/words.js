// The words of the page in Chinese; English is what the code says.
const chinese = {
  "Runs": "训练记录", "Start": "开始训练", "Look inside": "查看内部", "Talk": "对话", "Tokens": "词元", "Steps": "步", "Seconds": "秒",
  "Over": "横轴", "Log x": "x 对数", "Log y": "y 对数", "Smoothing": "平滑", "Filter": "筛选", "Group by": "分组", "Add a chart": "添加图表",
  "Show all": "全部显示", "Hide all": "全部隐藏", "Save as one HTML file": "存为单个 HTML 文件", "Saved": "已保存", "Show": "显示", "Colour": "颜色",
  "run": "名称", "tags": "标签", "trains": "训练中", "Whole": "全图", "Remove": "移除", "Copy": "复制", "Copied": "已复制",
  "No runs yet: start one": "还没有训练：请先开始一个", "Settings and result": "设置与结果", "The page's server does not answer": "页面服务器没有响应",
  "Plain lines; for charts with zoom: pip install bokeh": "简单折线；要可缩放的图表：pip install bokeh",
  "Preset": "预设", "none": "无", "Data": "数据", "Look at it": "看一看", "The most used": "最常用", "All knobs": "全部设置", "changed": "已改",
  "Command line": "命令行", "Estimate memory and time": "估计内存与时间", "Put into the queue": "加入队列", "Queue": "队列", "At once": "同时运行",
  "Stop": "停止", "Resume": "继续", "Duplicate with changes": "复制并修改", "Sweep": "扫描", "Grid": "网格", "Random": "随机", "Trials": "次数",
  "values, or from..to": "若干值，或 从..到", "Mark knobs to try several values": "勾选要尝试多个值的设置", "Started": "已开始", "Queued": "已排队",
  "Console": "输出", "queued": "排队中", "running": "运行中", "stopped": "已停止", "failed": "失败", "ended": "已结束", "Stopping: it saves first": "正在停止：先保存",
  "Progress": "进度", "left": "剩余", "of": "/", "Samples": "样例", "Predictions": "预测", "Alerts": "警告", "Files": "文件", "Settings": "设置",
  "Notes": "笔记", "Tags": "标签", "Save": "保存", "Checkpoints": "检查点", "Runs with it": "使用", "step": "步", "None": "无", "Evaluation": "评测",
  "prompt": "提示", "how": "方式", "text": "文本", "System": "系统", "All runs": "全部训练", "Only what was changed is passed on": "只传递改动过的设置",
  "expected": "应为", "accuracy": "准确率", "This takes a moment": "请稍候", "finished": "已完成", "not training": "未在训练", "Failures": "答错的",
  "Not a regular expression": "不是正则表达式",
}
let now = localStorage.getItem("language") || (navigator.language.startsWith("zh") ? "zh" : "en")
export const language = () => now
export function setLanguage(name) { localStorage.setItem("language", now = name) }
export const t = text => now === "zh" ? chinese[text] ?? text : text
/** More words, of other modules. */
export const learn = words => Object.assign(chinese, words)
